"""Find where statements begin and names are assigned in the bytecode of a source.

Line numbers are not sufficient: a statement may span several lines, and a line may hold
several statements. Each instruction has a column, and the syntax tree has the statement
at that position.
"""

import ast
import dis
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

Position = tuple[int, int]  # line from 1, and column in bytes
Function = ast.FunctionDef | ast.AsyncFunctionDef
Block = ast.stmt | ast.ExceptHandler | ast.match_case
COMPREHENSION = ast.ListComp | ast.SetComp | ast.DictComp
SILENT = {"RESUME", "RETURN_GENERATOR", "MAKE_CELL", "COPY_FREE_VARS"}


@dataclass(frozen=True, eq=False)
class Statement:
    """A statement, or the header of a compound one, by its first and last line."""

    line: int
    last_line: int


@dataclass(frozen=True)
class Target:
    """The target of an assignment: a name, and attributes of it."""

    name: str  # as written in the source
    path: tuple[str, ...]

    def read(self, frame: FrameType) -> Any:
        """The current value; None if it cannot be read."""
        root, *attributes = self.path
        value = frame.f_locals.get(root, frame.f_globals.get(root))
        for attribute in attributes:
            try:
                value = getattr(value, attribute)
            except Exception:
                return None
        return value


@dataclass(frozen=True)
class Assignments:
    """Consecutive assignments."""

    after: int  # offset of the instruction that follows
    targets: tuple[Target, ...]


@dataclass
class Plan:
    """The events of one code object, by the offset of their instructions."""

    code: CodeType
    entries: dict[int, Statement] = field(default_factory=dict)
    stores: dict[int, Assignments] = field(default_factory=dict)
    exits: dict[int, str] = field(default_factory=dict)
    points: set[int] = field(default_factory=set)


class SourceMap:
    """The statements and assignment targets of a source, by position."""

    def __init__(self, tree: ast.Module, source: str) -> None:
        self.lines = source.split("\n")
        self.definitions: dict[tuple[int, str], int] = {}  # by first line and name
        self.targets: dict[Position, ast.Attribute | ast.Subscript] = {}  # by end
        self.comprehensions: dict[Position, set[str]] = {}  # targets, by start
        self.order: dict[str, list[Position]] = {}  # positions of each target
        found: dict[Position, Statement] = {}
        for node in ast.walk(tree):
            if isinstance(node, Block):
                start, statement = self.statement(node)
                found[start] = statement
            elif isinstance(node, COMPREHENSION):
                names = {
                    name.id
                    for generator in node.generators
                    for name in ast.walk(generator.target)
                    if isinstance(name, ast.Name)
                }
                self.comprehensions[node.lineno, node.col_offset] = names
            elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
                if isinstance(node.ctx, ast.Store):
                    self.target(node)
        self.starts = sorted(found)
        self.statements = [found[start] for start in self.starts]

    def statement(self, node: Block) -> tuple[Position, Statement]:
        """The start of a statement, and its lines without nested statements."""
        if isinstance(node, ast.match_case):
            start = (node.pattern.lineno, node.pattern.col_offset)
            last = 0
        else:
            start = (node.lineno, node.col_offset)
            last = node.end_lineno or 0
        if isinstance(node, Function | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            start = (first, node.col_offset)
            if isinstance(node, Function):
                self.definitions[first, node.name] = node.lineno
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        if body:
            inner = body[0].pattern if isinstance(body[0], ast.match_case) else body[0]
            decorators = getattr(inner, "decorator_list", [])
            last = min([inner.lineno, *(d.lineno for d in decorators)])
            # The header ends on the last line of code before its body.
            if last > start[0]:
                last -= 1
                while self.lines[last - 1].strip()[:1] in ("", "#"):
                    last -= 1
        return start, Statement(start[0], last)

    def target(self, node: ast.Name | ast.Attribute | ast.Subscript) -> None:
        """Record the position of a target; `x[0] = …` changes `x`."""
        name = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
        self.order.setdefault(name, []).append((node.lineno, node.col_offset))
        if not isinstance(node, ast.Name):
            self.targets[node.end_lineno or 0, node.end_col_offset or 0] = node

    def at(self, position: dis.Positions | None) -> Statement | None:
        """The innermost statement that an instruction belongs to."""
        if position is None or position.lineno is None:
            return None
        # The first instruction of a function, and the implicit return, have no
        # position.
        column = position.col_offset
        if column is not None and column == position.end_col_offset == 0:
            return None
        key = (position.lineno, 1 << 30 if column is None else column)
        index = bisect_right(self.starts, key) - 1
        if index < 0:
            return None
        return self.statements[index]

    def targets_of(
        self, run: list[dis.Instruction], statement: Statement | None
    ) -> tuple[Target, ...]:
        """The targets of consecutive assignments, from left to right in the source."""
        found: list[Target] = []
        restored: set[str] = set()
        for instruction in run:
            name, where = instruction.argval, instruction.positions
            if instruction.opname in ("STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE"):
                end = where and (where.end_lineno or 0, where.end_col_offset or 0)
                found += self.target_at(end or (0, 0), name)
                continue
            names = [name] if isinstance(name, str) else [*name]
            if instruction.opname == "STORE_FAST_LOAD_FAST":
                del names[1:]
            found += [Target(name, (name,)) for name in names]
            # From Python 3.12, a comprehension runs in the enclosing frame, and
            # restores the earlier values of its targets at its end: this is no
            # assignment.
            start = where and (where.lineno or 0, where.col_offset or 0)
            restored |= self.comprehensions.get(start or (0, 0), set())
        for target in [Target(name, (name,)) for name in restored]:
            if target in found:
                found.remove(target)

        start = (statement.line if statement else 0, 0)
        return tuple(sorted(found, key=lambda target: self.place(target, start)))

    def target_at(self, end: Position, attribute: Any) -> list[Target]:
        """The attribute or subscripted value that ends at a position."""
        node = self.targets.get(end)
        if isinstance(node, ast.Attribute) and (path := dotted(node.value)):
            return [Target(ast.unparse(node), (*path, attribute))]  # with name mangling
        if isinstance(node, ast.Subscript) and (path := dotted(node.value)):
            return [Target(ast.unparse(node.value), path)]
        return []

    def place(self, target: Target, start: Position) -> Position:
        """The first position of a target from `start` on."""
        places = self.order.get(target.name, [])
        return min((place for place in places if place >= start), default=start)


def dotted(node: ast.expr) -> tuple[str, ...]:
    """The names in `self.a.b`; empty for any other expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (path := dotted(node.value)):
        return (*path, node.attr)
    return ()


def codes_of(tree: ast.Module, filename: str) -> set[CodeType]:
    """All code objects that a source compiles to."""

    def walk(code: CodeType) -> Iterator[CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from walk(constant)

    return set(walk(compile(tree, filename, "exec", dont_inherit=True)))


def plan_of(code: CodeType, source_map: SourceMap) -> Plan:
    """Find the events in the bytecode of one function."""
    plan = Plan(code)
    run: list[dis.Instruction] = []
    began = 0  # the offset of the first of them
    prefix: dis.Instruction | None = None
    previous: Statement | None = None

    for instruction in dis.get_instructions(code):
        # An instruction with a long argument is preceded by `EXTENDED_ARG`.
        first, prefix = prefix or instruction, None
        if instruction.opname == "EXTENDED_ARG":
            prefix = first
            continue
        name, offset = instruction.opname, first.offset
        silent = name in SILENT
        statement = None if silent else source_map.at(instruction.positions)
        reached = first.is_jump_target or statement is not previous
        if statement is not None and reached:
            plan.entries[offset] = statement

        stores = name.startswith("STORE_")
        if run and (reached or not stores):
            if targets := source_map.targets_of(run, previous):
                plan.stores[began] = Assignments(offset, targets)
            run = []
        if stores:
            began = began if run else offset
            run.append(instruction)
        elif name.startswith("RETURN_") and not silent:
            plan.exits[offset] = "return"
        elif name == "YIELD_VALUE":
            plan.exits[offset] = "yield"
        previous = statement

    after = {each.after for each in plan.stores.values()}
    plan.points = {*plan.entries, *plan.stores, *after}
    return plan
