r"""# Source text

A check reads the source text of a class or a function many times: for designs,
arguments and shapes that its names tell of. This module finds the text without parsing
the file each time.

Source: Python's [`inspect`](https://docs.python.org/3/library/inspect.html), whose text
it equals.
"""

import ast
import inspect
import sys
from contextlib import suppress
from functools import lru_cache
from types import CodeType
from typing import Any


def source_of(target: Any) -> str:
    r"""The source text of a class or a function; "" if there is none.

    Before Python 3.13, `inspect` parses the whole file for each of its classes.

    >>> source_of(inspect.Signature).partition(":")[0], source_of(int)
    ('class Signature', '')
    """
    with suppress(KeyError, OSError, SyntaxError, TypeError):
        if isinstance(target, type):
            text = inspect.getsource(sys.modules[target.__module__])
            return classes_in(text)[target.__qualname__]
    with suppress(OSError, TypeError):
        code = getattr(inspect.unwrap(target), "__code__", None)
        is_function = isinstance(code, CodeType)
        return text_of(code) if is_function else inspect.getsource(target)
    return ""


def source_with_bases(target: Any) -> str:
    r"""The source text of a class and of those from which it inherits; or a function's.

    Those of PyTorch are left out.

    >>> class Base: ...
    >>> source_with_bases(type("Kind", (Base,), {})), source_with_bases(int)
    ('', '')
    """
    kinds = target.__mro__ if isinstance(target, type) else [target]
    others = ("torch.", "builtins")
    own = (k for k in kinds if not str(getattr(k, "__module__", "")).startswith(others))
    return "\n".join(filter(None, map(source_of, own)))


@lru_cache(maxsize=256)  # `inspect` finds the end of a function by its tokens
def text_of(code: CodeType) -> str:
    """The source text of a function; "" if there is none."""
    with suppress(OSError):
        return inspect.getsource(code)
    return ""


@lru_cache(maxsize=64)
def classes_in(text: str) -> dict[str, str]:
    r"""The source text of each class of a file, by its qualified name.

    >>> classes_in("class A:\n    class B: ...\n\ndef f():\n    class C: ...\n")["A.B"]
    '    class B: ...\n'
    """
    lines, found = text.split("\n"), dict[str, str]()

    def visit(node: ast.AST, path: str) -> None:
        for part in ast.iter_child_nodes(node):
            inside = path
            if isinstance(part, ast.ClassDef):
                first = min([part.lineno, *(d.lineno for d in part.decorator_list)])
                source = "\n".join(lines[first - 1 : part.end_lineno]) + "\n"
                found.setdefault(path + part.name, source)
                inside = f"{path}{part.name}."
            elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = f"{path}{part.name}.<locals>."
            if not isinstance(part, ast.expr):
                visit(part, inside)

    visit(ast.parse(text), "")
    return found
