"""Find sizes with different meanings that an example may make equal by chance.

Such *rivals* are two sizes that a function takes from the shapes of its tensors, or two
integers that `__init__` takes from different parameters. A shape comment may name
either, and only an example in which they differ tells which one is meant.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Pairs = frozenset[tuple[str, str]]  # a name, and another that it may be mistaken for


class Origin(NamedTuple):
    """Where a function takes a size from: an axis of `x[0]`, which is of `x`."""

    variable: str
    tensor: str
    axis: int


class Drawn:
    """The sizes that a function takes from shapes, such as `b, n, d = x.shape`."""

    def __init__(self, function: Function) -> None:
        nodes = [*ast.walk(function)]
        found = [node for node in nodes if isinstance(node, ast.stmt)]
        # Of each statement the line, the names, and those of targets and values.
        self.statements = [
            (
                n.lineno,
                names_in(n),
                [(names_in(a), names_in(b)) for a, b in given_in(n)],
            )
            for n in sorted(found, key=lambda node: -node.lineno)
        ]
        once = bound_once(nodes)
        sizes = [
            (name, origin, node.lineno)
            for node in found
            for target, value in given_in(node)
            for name, origin in sizes_in(target, value)
            if name in once
        ]
        self.origins = {name: origin for name, origin, _ in sizes}
        # By size, what its tensor is made of.
        self.sources = {
            name: self.used(range(line, line), [origin.variable])
            for name, origin, line in sizes
        }
        self.equal = [pair for node in found for pair in required(node)]

    def used(self, lines: range, targets: Iterable[str]) -> set[str]:
        """The names in the code that computes a value, in some lines and before them.

        The value is what these lines compute, or that of `targets`.
        """
        seen = {*targets}
        for line, names, given in self.statements:
            # The tensor that a size is taken from need not be one of the value.
            wanted = seen - self.origins.keys()
            own = [v for target, v in given if target & wanted]
            if line < lines.start or (own and line in lines):
                seen = seen.union(*own)
            elif line in lines:
                seen |= names
        return seen

    def rivals(self, used: set[str]) -> Pairs:
        """The rivals of sizes, for a value whose code uses some names."""
        return frozenset(
            (one, other)
            for one, other in permutations(self.origins, 2)
            if {other, self.origins[other].variable} & used
            and not self.is_related(one, other)
        )

    def is_related(self, one: str, other: str) -> bool:
        """Whether two sizes may be one, of an axis or of a tensor and its result."""
        first, second = self.origins[one], self.origins[other]
        if {one, other} in self.equal:
            return True
        if first.variable != second.variable:
            here, there = self.sources[one], self.sources[other]
            return first.variable in there or second.variable in here
        unknown = (first.axis < 0) != (second.axis < 0)
        return first.tensor == second.tensor and (first.axis == second.axis or unknown)


def bound_once(nodes: list[ast.AST]) -> set[str]:
    """The variables that have one value, and are no parameters."""
    stores = (n.id for n in nodes if isinstance(n, ast.Name) and is_stored(n))
    parameters = (node.arg for node in nodes if isinstance(node, ast.arg))
    counts = Counter([*stores, *parameters, *parameters])
    return {name for name, count in counts.items() if count == 1 and name != "_"}


def is_stored(node: ast.Name | ast.Attribute) -> bool:
    """Whether a name is assigned."""
    return isinstance(node.ctx, ast.Store)


def names_in(node: ast.AST) -> set[str]:
    """The names in a part of the code, without those of statements inside it."""
    if isinstance(node, ast.expr):
        inner = [*ast.walk(node)]
    else:
        parts = (n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt))
        inner = [n for part in parts for n in ast.walk(part)]
    return {ast.unparse(n) for n in inner if isinstance(n, ast.Name | ast.Attribute)}


def given_in(node: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a statement assigns to what, tuples item by item."""
    match node:
        case ast.Assign(targets, value):
            for target in targets:
                yield from items_of(target, value)
        case ast.AnnAssign(target, value=ast.expr() as value):
            yield target, value
        case ast.AugAssign(target, value=value):
            yield from ((target, target), (target, value))
        case ast.For(target, value):
            yield target, value


def items_of(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """A target and its value, or those of each item of two tuples."""
    match target, value:
        case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(names) == len(values):
            yield from zip(names, values, strict=True)
        case _:
            yield target, value


def sizes_in(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, Origin]]:
    """The names that an assignment gives to sizes, and where it takes them from."""
    match target, value:
        case ast.Tuple(elts=names), ast.Subscript(inner, ast.Slice(lower)):
            yield from sizes_of(names, inner, integer(lower) if lower else 0)
        case ast.Tuple(elts=names), _:
            yield from sizes_of(names, value, 0)
        case ast.Name(name), ast.Call(ast.Name("len"), [tensor]):
            yield name, origin(tensor, 0)
        case ast.Name(name), ast.Call(ast.Attribute(tensor, "size"), [axis]):
            yield name, origin(tensor, integer(axis))
        case ast.Name(name), ast.Call(
            ast.Attribute(tensor, "size"), [], [ast.keyword(value=axis)]
        ):
            yield name, origin(tensor, integer(axis))
        case ast.Name(name), ast.Subscript(ast.Attribute(tensor, "shape"), axis):
            yield name, origin(tensor, integer(axis))


def sizes_of(
    names: list[ast.expr], shape: ast.expr, axis: int
) -> Iterator[tuple[str, Origin]]:
    """The names that are given to consecutive axes of `x.shape` or `x.size()`."""
    match shape:
        case ast.Attribute(tensor, "shape"):
            pass
        case ast.Call(ast.Attribute(tensor, "size"), []):
            pass
        case _:
            return
    for n, name in enumerate(names):
        if isinstance(name, ast.Starred):
            axis = -len(names)  # the rest is counted from the end
        elif isinstance(name, ast.Name):
            yield name.id, origin(tensor, axis + n)


def origin(tensor: ast.expr, axis: int) -> Origin:
    """An axis of a tensor."""
    node = tensor
    while True:
        match node:
            case ast.Attribute(ast.Name("self")):
                break
            case ast.Attribute(inner) | ast.Subscript(inner) | ast.Call(inner):
                node = inner
            case _:
                break
    return Origin(ast.unparse(node), ast.unparse(tensor), axis)


def integer(node: ast.expr) -> int:
    """The axis; -1, which may be any, if it is not an integer in the code."""
    try:
        return int(ast.literal_eval(node))
    except (ValueError, TypeError):
        return -1


def required(node: ast.stmt) -> Iterator[set[str]]:
    """The sizes that must be equal, by `assert n == m`, or `if n != m: raise`."""
    kind: type[ast.cmpop] = ast.Eq
    match node:
        case ast.If(test=test, body=[*_, ast.Raise()]):
            kind = ast.NotEq
        case ast.Assert(test=test):
            pass
        case _:
            return
    for inner in ast.walk(test):
        match inner:
            case ast.Compare(left, [operator], [right]) if isinstance(operator, kind):
                yield {ast.unparse(left), ast.unparse(right)}


def attributes(cls: ast.ClassDef) -> Pairs:
    """The rivals among the integers that `__init__` gives to an object."""
    stores = [
        ast.unparse(node)
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and is_stored(node)
    ]
    sources: dict[str, str] = {}
    for function in cls.body:
        if isinstance(function, Function) and function.name == "__init__":
            nodes = [*ast.walk(function)]
            changed = {n.id for n in nodes if isinstance(n, ast.Name) and is_stored(n)}
            statements = [node for node in nodes if isinstance(node, ast.stmt)]
            for target, value in (each for n in statements for each in given_in(n)):
                text = ast.unparse(target)
                if text.startswith("self.") and stores.count(text) == 1:
                    if is_given(value, changed):
                        alone = isinstance(value, ast.Constant)
                        sources[text[5:]] = text if alone else ast.unparse(value)
    pairs = permutations(sources, 2)
    return frozenset((a, b) for a, b in pairs if sources[a] != sources[b])


def is_given(value: ast.expr, changed: set[str]) -> bool:
    """Whether a value is a number, a parameter, or an item of a configuration."""
    kinds = ast.Name | ast.Attribute | ast.Subscript | ast.Constant | ast.Load
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    plain = all(isinstance(node, kinds) for node in ast.walk(value))
    return plain and not names & {"self", *changed}
