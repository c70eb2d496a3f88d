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
    """Every function and class of every module, and every method that it defines.

    What begins with an underscore is not public, but for the constructor.
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
            for method, body in vars(value).items():
                own = not method.startswith("_") and inspect.isfunction(body)
                if inspect.isclass(value) and own:
                    yield f"{path}.{method}", body
