"""Find the files that a script imports, directly or through other files.

Only files below the given folders are found: installed packages are identified by their
versions. Imports are read from the syntax tree, so nothing is executed; imports inside
of functions are included. Names that are computed at run time
(`importlib.import_module(f"package.{name}")`) are not found: list such files as inputs.
"""

import ast
import doctest
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sidenotes.cache import Memory, code_in
from sidenotes.split import LiterateError, named, read


class Import(NamedTuple):
    """`from module import name`, or `import module` where `name` is empty."""

    module: str
    name: str
    bound: str  # the name that the importing module gets
    typing_only: bool  # in a block `if TYPE_CHECKING:`


class Source(NamedTuple):
    """The imports of a file, and whether it imports names lazily."""

    imports: list[Import]
    example_imports: list[Import]
    is_lazy: bool  # a module with a function `__getattr__`


class Imports:
    """What files import, for the time of one build: no file may change meanwhile."""

    def __init__(self, roots: Sequence[Path], memory: Memory | None = None) -> None:
        self.roots = roots
        self.memory = memory or Memory()
        self.texts: dict[Path, str] = {}
        self.codes: dict[Path, str] = {}
        self.sources: dict[tuple[Path, str], Source] = {}
        self.found: dict[tuple[str, ...], Path | None] = {}  # by dotted name
        self.followed: dict[Import, Followed] = {}
        self.known: dict[Path, frozenset[Path]] = {}

    def of(self, file: Path) -> frozenset[Path]:
        """All files below `roots` that `file` or its examples import, transitively."""
        if file not in self.known:
            package = package_of(file, self.roots)
            source = self.source(file, package)
            # Importing a module executes the packages around it.
            around = Import(package, "__name__", "__name__", False)
            all_imports = [*runtime(source), *source.example_imports, around]
            self.known[file] = self.closure(all_imports) - {file}
        return self.known[file]

    def code(self, file: Path) -> str:
        """A hash of the code of a file."""
        if file not in self.codes:
            self.codes[file] = self.memory(code_in, self.text(file))
        return self.codes[file]

    def text(self, file: Path) -> str:
        """The text of a file."""
        if file not in self.texts:
            self.texts[file] = read(file)
        return self.texts[file]

    def closure(self, imports: Iterable[Import]) -> frozenset[Path]:
        """The files of some imports, and of the imports in those."""
        files: set[Path] = set()
        waiting = [*imports]
        seen: set[Import] = set()
        while waiting:
            item = waiting.pop()
            if item not in seen:
                seen.add(item)
                if item not in self.followed:
                    self.followed[item] = self.follow(item)
                files |= self.followed[item].files
                waiting += self.followed[item].imports
        return frozenset(files)

    def follow(self, item: Import) -> "Followed":
        """The files that an import executes, and what these import in turn."""
        files: set[Path] = set()
        imports: list[Import] = []
        for path, package, all_names in self.files_of(item):
            files.add(path)
            source = self.source(path, package)
            imports += runtime(source)
            if all_names:
                imports += source.imports
                if source.is_lazy and not any(i.typing_only for i in source.imports):
                    # Its imports are unknown: include the whole package.
                    files |= set(path.parent.rglob("*.py"))
            elif item.name and path.name == "__init__.py":
                imports += [i for i in source.imports if i.bound == item.name]
        return Followed(frozenset(files), tuple(imports))

    def files_of(self, item: Import) -> Iterator[tuple[Path, str, bool]]:
        """The files that an import executes: the packages around a module, and itself.

        Yields each with its package, and whether any of its names may be used later.
        """
        parts = item.module.split(".")
        if item.name and self.find([*parts, item.name]):
            parts.append(item.name)
        for count in range(1, len(parts) + 1):
            path = self.find(parts[:count])
            if path is None:
                return
            inside = parts[:count] if path.name == "__init__.py" else parts[: count - 1]
            any_name = count == len(parts) and item.name in ("", "*")
            yield path, ".".join(inside), any_name

    def source(self, file: Path, package: str) -> "Source":
        """The imports of a file."""
        if (file, package) not in self.sources:
            try:
                found = self.memory(imports_in, self.text(file), package)
            except SyntaxError as error:
                reason = f"{file}:{error.lineno}: does not parse: {error}"
                raise LiterateError(reason) from None
            imports, examples = ([Import(*item) for item in each] for each in found[:2])
            self.sources[file, package] = Source(imports, examples, found[2])
        return self.sources[file, package]

    def find(self, parts: Sequence[str]) -> Path | None:
        """The file of a module, by the parts of its dotted name."""
        name = tuple(parts)
        if name not in self.found:
            places = [root.joinpath(*parts) for root in self.roots]
            pairs = [(p / "__init__.py", p.with_suffix(".py")) for p in places]
            files = [file for pair in pairs for file in pair if file.is_file()]
            self.found[name] = files[0] if files else None
        return self.found[name]


class Followed(NamedTuple):
    """The files that an import executes, and the imports in them."""

    files: frozenset[Path]
    imports: tuple[Import, ...]


def runtime(source: Source) -> list[Import]:
    """The imports that are executed."""
    return [item for item in source.imports if not item.typing_only]


def package_of(file: Path, roots: Iterable[Path]) -> str:
    """The dotted name of the package that contains a file."""
    for root in roots:
        if file.is_relative_to(root):
            return ".".join(file.relative_to(root).parent.parts)
    return ""


def imports_in(source: str, package: str) -> tuple[list[Import], list[Import], bool]:
    """The imports of a source, those of its examples, and whether it is lazy."""
    tree = ast.parse(source)
    examples: list[Import] = []
    for node in [tree, *(definition for _, definition in named(tree))]:
        docstring = ast.get_docstring(node)
        if docstring and ">>>" in docstring:
            examples += imports_of_examples(docstring, package)
    is_lazy = any(
        isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
        for node in tree.body
    )
    return [*imports_of(tree, package)], examples, is_lazy


def imports_of(tree: ast.AST, package: str, typing: bool = False) -> Iterator[Import]:
    """All imports below a node."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield Import(alias.name, "", bound, typing)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, package)
            for alias in node.names:
                yield Import(module, alias.name, alias.asname or alias.name, typing)
        elif not isinstance(node, ast.expr):  # most nodes, and none holds an import
            only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            yield from imports_of(node, package, typing or only)


def absolute(node: ast.ImportFrom, package: str) -> str:
    """The absolute name of the module in a relative import."""
    parts = package.split(".") if package and node.level else []
    parts = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*parts, *(node.module or "").split(".")]).strip(".")


def imports_of_examples(docstring: str, package: str) -> Iterator[Import]:
    """The imports in doctest examples."""
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
        for example in examples:
            yield from imports_of(ast.parse(example.source), package)
    except (SyntaxError, ValueError):
        return  # running the examples reports the error and its line
