"""Execute notebooks where nothing is installed but the wheel and what they name.

The environment is a folder with the unpacked wheel, and links to the packages of this
environment that pip would install beside it. One process imports PyTorch, and each
notebook is executed by a fork of that process, in an empty folder.
"""

import ast
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zipfile import ZipFile


class Task(NamedTuple):
    """A notebook, the packages that it names, and whether to run all of it."""

    path: str
    packages: tuple[str, ...]
    whole: bool
    """Otherwise only its imports are executed."""


def required(names: Iterable[str]) -> set[str]:
    """The names of packages, and of all that they require."""
    # Imported here: the environment does not have it.
    from packaging.requirements import Requirement

    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            for text in distribution(name).requires or ():
                one = Requirement(text)
                if one.marker is None or one.marker.evaluate({"extra": ""}):
                    waiting.append(one.name)
    return found


def link(folder: Path, names: Iterable[str]) -> None:
    """Link packages, and all that they require, into a folder."""
    folder.mkdir(exist_ok=True)
    for name in required(names):
        package = distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {".."}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(package.locate_file(top)))


def execute(wheel: Path, tasks: Iterable[Task]) -> dict[str, tuple[str, float]]:
    """For each notebook, the error that it raised, if any, and its CPU seconds."""
    groups: dict[str, list[Task]] = {}
    with TemporaryDirectory() as folder:
        base, home = Path(folder, "base"), Path(folder, "home")
        home.mkdir()
        with ZipFile(wheel) as archive:
            archive.extractall(base)
        # Jupyter brings IPython, and each notebook names NumPy or what needs it.
        link(base, ["torch", "ipython", "numpy"])
        for task in tasks:
            extra = Path(folder, "-".join(["extra", *task.packages]))
            link(extra, task.packages)
            groups.setdefault(str(extra), []).append(task)
        # -S hides the packages of this environment, -P this folder.
        command = [sys.executable, "-S", "-P", __file__, json.dumps(groups)]
        environment = {
            "PYTHONPATH": str(base),
            "HOME": str(home),
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        result = subprocess.run(
            command, cwd=home, env=environment, stdout=subprocess.PIPE, check=True
        )
    found: dict[str, tuple[str, float]] = json.loads(result.stdout)
    return found


def forked(work: Callable[[], Any]) -> Any:
    """The result of `work` in a fork of this process; None where it is killed."""
    receiver, sender = os.pipe()
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.write(sender, json.dumps(work()).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as file:
        text = file.read()
    os.wait()
    return json.loads(text) if text else None


def run_group(extra: str, tasks: Iterable[Task]) -> dict[str, Any]:
    """Run notebooks that name the same packages."""
    sys.path.append(extra)
    if find_spec("matplotlib"):
        import_module("matplotlib.pyplot")
    return {task.path: forked(lambda task=task: run(task)) for task in tasks}


def run(task: Task) -> tuple[str, float]:
    """Execute the code cells of a notebook, or only their imports."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    notebook = json.loads(Path(task.path).read_text(encoding="utf-8"))
    error: BaseException | None = None
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and error is None:
            source = "".join(cell["source"])
            if not task.whole:
                kinds = ast.Import, ast.ImportFrom
                body = [n for n in ast.parse(source).body if isinstance(n, kinds)]
                source = "\n".join(map(ast.unparse, body))
            result = shell.run_cell(source)
            error = result.error_before_exec or result.error_in_exec
    used = resource.getrusage(resource.RUSAGE_SELF)
    return repr(error) if error else "", used.ru_utime + used.ru_stime


def main() -> None:
    """Run the groups of tasks in the first argument, and print what came of them."""
    for module in ("IPython", "torch"):
        import_module(module)

    found: dict[str, Any] = {}
    for extra, tasks in json.loads(sys.argv[1]).items():
        given = [Task(*task) for task in tasks]
        found |= forked(lambda extra=extra, given=given: run_group(extra, given))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
