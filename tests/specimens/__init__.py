"""Attention modules that violate each law, and modules that pass; for tests only.

A family of laws has a file, with the modules and with what each is a case of:
`VIOLATING` has, for each law, the modules that violate it, with their options.
`PASSING_ONE` has modules that pass a law, and differ little from those that violate it.
`EXCUSED` has designs that violate a law by intention: it is skipped with the reason.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from specimens.base import (
    CACHE,
    Correct,
    Excuses,
    LinearBias,
    MaskedSelfAttention,
    Passes,
    Rotary,
    SelfAttention,
    Violations,
    Window,
    WithCache,
)

# One module for each family of laws, in the order of their names.
FAMILIES = tuple(
    import_module(f"specimens.{module.name}")
    for module in iter_modules(__path__)
    if module.name != "base"
)

VIOLATING: Violations = {}
PASSING_ONE: Passes = []
EXCUSED: Excuses = []
for family in FAMILIES:
    for law, cases in family.VIOLATING.items():
        VIOLATING.setdefault(law, []).extend(cases)
    PASSING_ONE += getattr(family, "PASSING_ONE", [])
    EXCUSED += getattr(family, "EXCUSED", [])

# Modules that pass all laws.
PASSING: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (Correct, {}),
    (MaskedSelfAttention, {}),
    (SelfAttention, {}),
    (WithCache, CACHE),
    (Window, {"window": 3}),
    (LinearBias, {"positions": "alibi"}),
    (Rotary, {"positions": "rotary"}),
]


def each_law_of(family: ModuleType) -> pytest.MarkDecorator:
    """Run a slow test once for each law of a module."""
    from attention_laws import LAWS

    names = [
        name for name, law in LAWS.items() if law.test.__module__ == family.__name__
    ]
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=pytest.mark.slow) for n in names]
    )


def assert_caught(law: str, device: str) -> None:
    """Each module violates `law`, and its counterexample runs on its own.

    Only that of the first is made smaller, which takes longer than to find it.
    """
    from attention_laws import check, checker

    for number, (specimen, options) in enumerate(VIOLATING[law]):
        with pytest.MonkeyPatch.context() as patch:
            if number:
                patch.setattr(checker, "SHRINKING_RUNS", 0)
                patch.setattr(checker, "SLOW_SHRINKING_RUNS", 0)
            report = check(specimen, only=law, device=device, **options)
        assert [r.law.name for r in report.failed] == [law], f"{specimen}\n{report}"
        example = report.failed[0].counterexample
        assert example is not None
        failure = failure_of(example.code)
        # It fails at its last line: the assertion, or the call that raises.
        assert isinstance(failure, AssertionError) != ("raises" in example.message)
        traceback = failure.__traceback__
        assert traceback is not None
        assert traceback.tb_next is not None
        assert traceback.tb_next.tb_lineno == len(example.code.splitlines())


def failure_of(code: str) -> Exception:
    """The exception that a program raises."""
    try:
        exec(compile(code, "<counterexample>", "exec"), {})
    except Exception as error:
        return error
    raise AssertionError(f"it does not fail:\n{code}")
