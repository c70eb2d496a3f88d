"""Which callables are attacked, which are reached through those, and which are not."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import headnotes
from hostile.dice import Dice
from hostile.outcome import Call

Attack = Callable[[Dice], Call]

ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """Enter an attack under the name of what it calls, without `headnotes.`."""

    def enter(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return enter


def public() -> Iterator[tuple[str, Any]]:
    """Every function and class of every module, and every method of our own.

    A class has the methods that it defines and those that it inherits from another
    class of the package. What begins with an underscore is not public, but for the
    constructor.
    """
    for found in pkgutil.walk_packages(headnotes.__path__, "headnotes."):
        module = importlib.import_module(found.name)
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", "") != found.name:
                continue
            if not inspect.isfunction(value) and not inspect.isclass(value):
                continue
            path = f"{found.name.removeprefix('headnotes.')}.{name}"
            yield path, value
            if not inspect.isclass(value):
                continue
            for method, body in inspect.getmembers(value, inspect.isfunction):
                own = body.__module__.startswith("headnotes.")
                if own and not method.startswith("_"):
                    yield f"{path}.{method}", body
