r"""# What an exercise consists of

An exercise has two files: a notebook in `docs/exercises`, with the task, hints and code
to complete, and a module in `headnotes.exercises.solutions` of the same name, with the
solution, its inputs and typical mistakes. That module ends with an `Exercise`.

Source: the notebooks are scripts in [jupytext's percent
format](https://jupytext.readthedocs.io/en/latest/formats-scripts.html).
"""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# The notebooks are beside this file in an installed package, and in the folder of the
# pages in the sources.
INSTALLED = Path(__file__).parent / "notebooks"
SOURCES = Path(__file__).parents[3] / "docs" / "exercises"

SERIES = (
    "Write it",
    "Make it fast, make it decode",
    "Make it modern",
    "Find the bug",
)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """How most exercises call a solution."""
    return function(*arguments)


def evaluate(attention: type[nn.Module], *inputs: Tensor) -> Any:
    """How the series *Find the bug* calls a class, here with two heads."""
    torch.manual_seed(0)
    module = attention(d_model=inputs[0].shape[-1], heads=2)
    return module.eval()(*inputs)


@dataclass(frozen=True)
class Exercise:
    """The solution of an exercise, and all that is needed to check another one.

    `reference` computes the expected answers, without the code of the solution.
    `inputs` are tuples of arguments, from the smallest to the largest. Each of the
    `mistakes` is a wrong solution, and its docstring is the hint for it. `run(solution,
    *arguments)` returns the answer, which is a tensor or a tuple of tensors; it is
    needed where the solution is a class. `laws` are those that the code of a *Find the
    bug* exercise violates, when it is checked with these `options`.
    """

    series: str
    solution: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]
    mistakes: Sequence[Callable[..., Any]]
    run: Callable[..., Any] = call
    laws: Sequence[str] = ()
    options: Mapping[str, Any] = field(
        default_factory=lambda: {"layout": "batch_first", "causal": True}
    )


def notebooks() -> dict[str, Path]:
    r"""The notebook of each exercise, by the name of the exercise, in their order.

    >>> notebooks()["causal_mask"].name
    '03_causal_mask.py'
    """
    folder = INSTALLED if INSTALLED.is_dir() else SOURCES
    found = sorted(folder.glob("[0-9][0-9]_*.py"))
    return {name_of(path): path for path in found}


def name_of(path: Path) -> str:
    r"""The exercise that a file belongs to, which may begin with its number.

    >>> name_of(Path("03_causal_mask.ipynb")), name_of(Path("causal_mask.py"))
    ('causal_mask', 'causal_mask')
    """
    return re.sub(r"^\d\d_", "", path.stem)


def title_of(path: Path) -> str:
    r"""What a notebook is about, from its first heading.

    >>> title_of(notebooks()["causal_mask"])
    'causal mask'
    """
    text = path.read_text(encoding="utf-8")
    heading = re.search(r"^# # Exercise: (.+)$", text, re.MULTILINE)
    if heading is None:
        raise ValueError(f"`{path}` has no heading `# # Exercise: …`; write one")
    return heading[1].replace("`", "")


def load(name: str) -> Exercise:
    r"""The exercise of a name; `ValueError` where there is none.

    >>> load("causal_mask").solution.__name__
    'causal_mask'
    """
    if name not in notebooks():
        known = ", ".join(notebooks())
        raise ValueError(f"`{name}` is no exercise; there are {known}")
    module = importlib.import_module(f"headnotes.exercises.solutions.{name}")
    exercise: Exercise = module.EXERCISE
    return exercise


def numbers(*shape: int, seed: int = 0) -> Tensor:
    r"""Random numbers for inputs: multiples of 1/8 from -2 to 2, which print exactly.

    >>> numbers(2, 3).shape
    torch.Size([2, 3])
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=generator) / 8
