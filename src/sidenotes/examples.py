"""Import a module by its path, and run the examples in its docstrings."""

import ast
import doctest
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from sidenotes.split import UNREADABLE, LiterateError, read

# What a relative import begins with; most files have none, and need not be parsed.
RELATIVE = re.compile(r"\bfrom[\s\\]*\.")


class TraceError(Exception):
    """An example that raises, or a module that cannot be traced: file, line, reason."""


def name_of(path: Path) -> tuple[str, Path]:
    """The dotted name of a file in its package, and the folder that holds that.

    A folder without `__init__.py` is a package, too, if the file has relative imports
    (`from .x`): each dot is one more folder.
    """
    parts = [] if path.stem == "__init__" else [path.stem]
    folder, dots = path.parent, most_dots(path)
    while (folder / "__init__.py").is_file() or dots > 0:
        parts.insert(0, folder.name)
        folder, dots = folder.parent, dots - 1
    return ".".join(parts), folder


def most_dots(path: Path) -> int:
    """The number of folders that relative imports go up; 1 is the file's own."""
    try:
        source = read(path)
        if not RELATIVE.search(source):
            return 0
        nodes = ast.walk(ast.parse(source))
    except (LiterateError, *UNREADABLE):
        return 0  # the import will raise the same error
    return max((n.level for n in nodes if isinstance(n, ast.ImportFrom)), default=0)


@contextmanager
def imported(path: Path) -> Iterator[ModuleType]:
    """The module in a file; in a package, the same object that other modules import.

    A single file is executed anew each time, and so is one in a package without
    `__init__.py`: it and the modules beside it are removed from `sys.modules` at the
    end.
    """
    path = path.resolve()
    if not path.is_file():
        raise TraceError(f"{path}:1: there is no such file")
    name, folder = name_of(path)
    top = name.partition(".")[0]
    lone = folder == path.parent
    fresh = lone or not (folder / top / "__init__.py").is_file()
    known = dict(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        try:
            module = run(name, path) if lone else importlib.import_module(name)
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}"
            raise TraceError(f"{path}:1: cannot be imported: {what}") from error
        found = Path(module.__file__ or "")
        if not found.is_file() or not found.samefile(path):
            raise TraceError(f"{path}:1: `import {name}` finds {found} instead")
        yield module
    finally:
        with suppress(ValueError):
            sys.path.remove(str(folder))
        if fresh:
            for key in {name, *(sys.modules.keys() - known.keys())}:
                file = getattr(sys.modules.get(key), "__file__", None)
                beside = file and Path(file).parent == path.parent
                if beside or key.partition(".")[0] == top:
                    sys.modules.pop(key, None)
            if name in known:
                sys.modules[name] = known[name]


def run(name: str, path: Path) -> ModuleType:
    """Import a single file, without writing bytecode to the disk."""
    spec = spec_from_file_location(name, path)
    assert spec is not None  # there is a loader for each `.py`
    module = sys.modules[name] = module_from_spec(spec)
    code = compile(read(path), str(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module


def run_calls(
    module: ModuleType, calls: Sequence[str], begin: Callable[[int], None]
) -> None:
    """Run statements in a copy of a module's names; `torch` is known if imported."""
    names = {"torch": sys.modules.get("torch"), **vars(module)}
    for number, call in enumerate(calls):
        begin(number)
        try:
            exec(call, names)
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}"
            raise TraceError(f"{module.__file__}:1: `{call}` raises {what}") from error


class Examples(doctest.DocTestRunner):
    """Runs the examples of a module in the order of lines; does not compare output."""

    def __init__(self, module: ModuleType, begin: Callable[[int], None]) -> None:
        super().__init__(verbose=False)
        self.begin = begin
        self.file = module.__file__
        tests = doctest.DocTestFinder().find(module)
        self.docstrings = sorted(tests, key=lambda test: test.lineno or 0)
        examples = [e for test in self.docstrings for e in test.examples]
        self.numbers = {id(example): n for n, example in enumerate(examples)}

    def run_all(self) -> None:
        """Run all examples; those of one docstring share their variables."""
        for test in self.docstrings:
            self.run(test, out=lambda _: None)

    def report_start(self, out: Any, test: Any, example: doctest.Example) -> None:
        self.begin(self.numbers[id(example)])

    def report_success(self, out: Any, test: Any, example: Any, got: str) -> None:
        pass

    def report_failure(self, out: Any, test: Any, example: Any, got: str) -> None:
        pass

    def report_unexpected_exception(
        self, out: Any, test: doctest.DocTest, example: doctest.Example, exc_info: Any
    ) -> None:
        line = (test.lineno or 0) + example.lineno + 1
        what = f"{exc_info[0].__name__}: {exc_info[1]}"
        message = f"{self.file}:{line}: the example raises {what}"
        raise TraceError(message) from exc_info[1]
